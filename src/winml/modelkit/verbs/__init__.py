"""Parts that the plans of several verbs share."""
