"""The console: a page with a playground, and with load, prefixes and decisions for those who run the picker."""
