"""Hostile cases: what users do by mistake, each in two fresh processes.

``python -m tests.hostile [words]`` runs those whose names have one of the words in them, or all. A
case ends right, or with an error of :mod:`fabric.errors` on every rank. It is never silently wrong
(the asserts in it), never raw, never hangs, and leaves neither a process nor a temporary file.
``tests/test_hostile.py`` runs a sample of them.
"""
