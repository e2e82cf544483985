"""Golden texts: what passes and emitters print, kept as files."""
