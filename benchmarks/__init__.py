"""The code behind `eaglejax bench`, and the committed results."""
