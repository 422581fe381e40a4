"""Runs on the Hugging Face Hub: published as one repository, loaded again model by model. Uses runs and views."""
