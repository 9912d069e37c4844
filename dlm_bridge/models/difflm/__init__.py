"""MegaDLMs' Hub exports (Quokka, Super Data Learners): a Qwen3-like body under the class name DiffLM."""
