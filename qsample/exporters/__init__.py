"""Export: a Hugging Face model, or a decoder file of another exporter, becomes a portable
package."""
