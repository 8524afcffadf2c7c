"""Data that a reader can rebuild: `python_corpus` and `english_corpus`, behind ``bakeoff corpus``."""

from bakeoff.apps.corpus.english import URLS, english_corpus
from bakeoff.apps.corpus.folder import CorpusError, Entry, Manifest, check, read_manifest
from bakeoff.apps.corpus.sources import python_corpus

__all__ = [
    "URLS",
    "CorpusError",
    "Entry",
    "Manifest",
    "check",
    "english_corpus",
    "python_corpus",
    "read_manifest",
]
