"""Budgeted active test-time adaptation."""
