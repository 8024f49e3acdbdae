"""How each study is shown: `page` renders its stored reports, and draws the figures beside them."""
