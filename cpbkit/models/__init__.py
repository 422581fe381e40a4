"""Forecasting models with a leading model axis, and the naive forecasts they are judged against."""
