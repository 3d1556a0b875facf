package org.apache.fluss.server.coordinator;

import org.apache.fluss.config.Configuration;
import org.apache.fluss.plugin.PluginManager;

/** Has to be there for {@link MetadataManager}. */
public class LakeCatalogDynamicLoader {
    public LakeCatalogDynamicLoader(Configuration config, PluginManager plugins, boolean server) {}
}
