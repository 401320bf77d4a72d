//! The expert store on files that misbehave, its cache under random use, and histories on disk.

mod cache;
mod faults;
mod mirror;
mod support;
mod usage;
