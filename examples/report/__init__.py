"""An agent that reads documents, writes a PDF about them, has it approved, and mails it: once, whatever dies in between."""
