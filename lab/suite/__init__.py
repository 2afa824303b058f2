"""The suite nano: the model that ships, against its bars."""
