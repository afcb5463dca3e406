"""Wire format: .proto files, the code generated from them, and the conversion to domain types."""
