"""The console: a page for whoever runs the picker, on the admin port beside the debug pages."""
