"""Figures, the live view, the report; nothing else imports matplotlib or ipywidgets. Uses runs and below."""
