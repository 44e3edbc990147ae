"""Migrations of the ledger's tables from older versions to this one."""
