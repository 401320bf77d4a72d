//! The expert store on files that misbehave, and its cache under random use.

mod cache;
mod faults;
mod support;
