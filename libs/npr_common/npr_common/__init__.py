"""What more than one NPR service needs."""
