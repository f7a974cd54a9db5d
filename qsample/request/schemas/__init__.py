"""JSON schemas as clients write them, and their normal form."""
