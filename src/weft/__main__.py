"""python -m weft"""

from weft.cli import main

main()
