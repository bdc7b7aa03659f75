"""What a layer is: its kind, its matrix view and its cut into blocks and tiles."""
