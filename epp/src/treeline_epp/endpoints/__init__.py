"""What is known of each endpoint: where it is, how it is, how busy it is."""
