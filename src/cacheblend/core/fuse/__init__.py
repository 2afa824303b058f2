"""The layer loop: a prompt's prefill as a stepper, the question's pass, and several prefills side by side."""
