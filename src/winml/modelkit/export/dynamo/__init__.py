"""How is a module's forward captured with torch's dynamo exporter?"""
