"""What carries messages between processes: links over mutual TLS, and what they carry."""
