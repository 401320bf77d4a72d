//! Integration tests of the crate, one binary.

#[path = "container/common.rs"]
mod common;
#[path = "container/config.rs"]
mod config;
#[path = "container/header.rs"]
mod header;
#[path = "container/model.rs"]
mod model;
#[path = "container/recognise.rs"]
mod recognise;
#[path = "container/shards.rs"]
mod shards;
#[path = "container/size.rs"]
mod size;
#[path = "container/template.rs"]
mod template;
#[path = "container/tokenizer.rs"]
mod tokenizer;
