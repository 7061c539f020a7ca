"""Lines that training programs print, read as metrics."""
