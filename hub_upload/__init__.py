"""Uploads a draft to the Hub as a repository that works for strangers: `python -m hub_upload CHECKPOINT REPO_ID`."""
