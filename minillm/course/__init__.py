"""What the notebooks import: start, agree, check, quiz, show, figures, the ladder and the ledger of guesses."""
