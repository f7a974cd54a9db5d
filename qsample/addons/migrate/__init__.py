"""Names of other programs: the commands and options of vLLM, ollama and llama.cpp; QEfficient's arguments."""
