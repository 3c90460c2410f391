"""SGD at the server: its batches and its steps."""
