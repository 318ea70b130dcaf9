"""`make mutants`: change one line of fabric at a time, and count how often the tests notice."""
