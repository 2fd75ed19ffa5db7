"""The console: a page for the picker's administrators, on the admin port beside the debug pages."""
