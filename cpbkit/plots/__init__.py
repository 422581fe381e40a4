"""Figures for notebooks, the live view and the report; nothing else in the kit imports matplotlib."""
