//! A connection to one worker, by protocol version 1.

use std::io::ErrorKind;
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use crate::tcp::{self, TcpError};
use crate::wire::v1::{Item, OK, ReplyReader};
use crate::wire::{Shape, WireError};

/// Time for a connection to be made.
const CONNECT_TIME: Duration = Duration::from_secs(3);
/// Bytes read at once.
const READ_BYTES: usize = 64 << 10;

/// Why a worker could not be asked, or did not answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum LinkError {
    #[error("it cannot be reached: {0}")]
    Connect(std::io::Error),
    #[error("it ended the connection; its own output says why, such as another model")]
    Ended,
    #[error(transparent)]
    Tcp(TcpError),
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error(
        "it could not compute what was asked (status {0}); its own output says why. If it holds a \
         part of the experts only, --place \"layers A-B=WORKER\" must say which"
    )]
    Status(u32),
    #[error("it sent more than its answer")]
    More,
}

/// A connection.
pub(super) struct Link {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Link {
    /// Connects to `host:port`.
    pub fn connect(name: &str) -> Result<Link, LinkError> {
        let addresses = name.to_socket_addrs().map_err(LinkError::Connect)?;
        let mut refused = std::io::Error::other("the name has no address");
        for address in addresses {
            match TcpStream::connect_timeout(&address, CONNECT_TIME) {
                Ok(stream) => {
                    tcp::prepare(&stream).map_err(LinkError::Connect)?;
                    return Ok(Link { stream, buffer: vec![0; READ_BYTES] });
                }
                Err(error) => refused = error,
            }
        }
        Err(LinkError::Connect(refused))
    }

    /// Sends a request for these experts and numbers of rows, and takes its reply.
    pub fn ask(
        &mut self,
        shape: Shape,
        request: &[u8],
        asked: &[(u32, u32)],
        deadline: Instant,
    ) -> Result<Vec<Item>, LinkError> {
        tcp::write_until(&self.stream, request, deadline).map_err(ended)?;
        let mut reader = ReplyReader::new(shape.hidden, asked.to_vec());
        loop {
            let read = tcp::read_until(&self.stream, &mut self.buffer, deadline).map_err(ended)?;
            let mut input = &self.buffer[..read];
            let Some(reply) = reader.take(&mut input)? else { continue };
            return match reply.status {
                OK if input.is_empty() => Ok(reply.items),
                OK => Err(LinkError::More),
                status => Err(LinkError::Status(status)),
            };
        }
    }
}

/// A peer that closes or resets a connection has ended it.
fn ended(error: TcpError) -> LinkError {
    match error {
        TcpError::Cut => LinkError::Ended,
        TcpError::Io(error)
            if matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) =>
        {
            LinkError::Ended
        }
        other => LinkError::Tcp(other),
    }
}
