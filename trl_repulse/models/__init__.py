"""What is done to models whoever trains them: DeepSpeed, FSDP2, PEFT, and rows in which completions share a prompt."""
