"""What carries messages between processes: links over gRPC with mutual TLS, and what they carry."""
