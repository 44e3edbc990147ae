"""How do the tables of an older version become those of this one?"""
