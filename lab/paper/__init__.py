"""The paper's evaluation on a user's own weights and data: seven figures in one report (`run.run_paper`)."""
