"""What a model is: its files, shape, tokenizer and chat template.  The ground floor: imports nothing of ours."""
