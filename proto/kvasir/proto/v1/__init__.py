"""Generated from *.proto by `make protos`; never edited."""
