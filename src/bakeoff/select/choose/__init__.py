"""Choosing: from a call to the candidate that runs it, by tables of verdicts and policies."""
