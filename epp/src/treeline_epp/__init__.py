"""The endpoint picker: which pod serves a request, decided from where its prefix lives."""
