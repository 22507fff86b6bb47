"""The program that walls off local sandboxes, named where settings are checked and where it is used."""

PROGRAM = "bwrap"
REMEDY = "Install bubblewrap 0.8 or later (apt-get install bubblewrap), or run programs without a wall: --sandbox none"
