"""Export, a Hugging Face model as a portable package, and compile, a portable package as one for a device."""
