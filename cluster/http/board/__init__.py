"""The board: a page that shows the cluster live. `picture` is what it shows, `board` sends it, `page.html` draws it."""
