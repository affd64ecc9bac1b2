package kvfork

import (
	"context"
	"iter"

	pb "kvfork.example/go/kvforkv1"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

// Client is a connection to one server. It may be used by any number of goroutines.
type Client struct {
	connection *grpc.ClientConn
	inference  pb.InferenceServiceClient
	snapshots  pb.SnapshotServiceClient
	server     pb.ServerServiceClient
}

// Dial prepares a connection to "host:port" or "unix:/path". It does not wait for the server: calls do, or fail.
func Dial(address string, options ...DialOption) (*Client, error) {
	connection, err := dial(address, options)
	if err != nil {
		return nil, err
	}
	return &Client{
		connection: connection,
		inference:  pb.NewInferenceServiceClient(connection),
		snapshots:  pb.NewSnapshotServiceClient(connection),
		server:     pb.NewServerServiceClient(connection),
	}, nil
}

// Close cancels what runs and closes the connection. Snapshots stay on the server.
func (c *Client) Close() error { return c.connection.Close() }

// Generate starts a generation. It always returns one; what is wrong with the call comes out of the first read.
//
// The generation ends with the context: a deadline loses the end of the stream, Stopping.TimeLimit does not.
func (c *Client) Generate(ctx context.Context, request *pb.GenerateRequest) *Generation {
	return c.generate(ctx, request, nil)
}

// CreateSnapshot prefills an input and names the result; Snapshot.Marks has the snapshots of its marks.
func (c *Client) CreateSnapshot(ctx context.Context, request *pb.CreateSnapshotRequest) (*Snapshot, error) {
	request = proto.CloneOf(request)
	request.Input = continued(request.Input, request.Parent)
	request.RequestId = requestID(request.RequestId)
	reply, err := c.inference.CreateSnapshot(ctx, request)
	if err != nil {
		return nil, typed(err)
	}
	made := c.handle(reply.Snapshot, reply.Usage)
	for index, info := range reply.Marked {
		made.Marks[index] = c.handle(info, nil)
	}
	return made, nil
}

// Snapshot is a handle for a name known from elsewhere. It asks the server nothing: Info has the name alone.
func (c *Client) Snapshot(name string) *Snapshot { return c.handle(&pb.Snapshot{Name: name}, nil) }

// GetSnapshot looks a snapshot up. The error Is ErrGone if there is none.
func (c *Client) GetSnapshot(ctx context.Context, name string) (*Snapshot, error) {
	reply, err := c.snapshots.GetSnapshot(ctx, &pb.GetSnapshotRequest{Name: name})
	if err != nil {
		return nil, typed(err)
	}
	return c.handle(reply.Snapshot, nil), nil
}

// ListSnapshots goes through the caller's snapshots, oldest first, page after page as they are needed.
func (c *Client) ListSnapshots(ctx context.Context, request *pb.ListSnapshotsRequest) iter.Seq2[*Snapshot, error] {
	return func(yield func(*Snapshot, error) bool) {
		request := proto.CloneOf(request)
		for {
			page, err := c.snapshots.ListSnapshots(ctx, request)
			if err != nil {
				yield(nil, typed(err))
				return
			}
			for _, info := range page.Snapshots {
				if !yield(c.handle(info, nil), nil) {
					return
				}
			}
			if request.PageToken = page.NextPageToken; request.PageToken == "" {
				return
			}
		}
	}
}

// ExtendSnapshots gives up to 1000 snapshots more time. Missing names are told in the reply, and no error.
func (c *Client) ExtendSnapshots(
	ctx context.Context, request *pb.ExtendSnapshotsRequest,
) (*pb.ExtendSnapshotsResponse, error) {
	reply, err := c.snapshots.ExtendSnapshots(ctx, request)
	return reply, typed(err)
}

// WatchSnapshots follows changes: first what there is, then Synced, then what happens. Leaving the loop ends it.
func (c *Client) WatchSnapshots(
	ctx context.Context, request *pb.WatchSnapshotsRequest,
) iter.Seq2[*pb.WatchSnapshotsResponse, error] {
	return func(yield func(*pb.WatchSnapshotsResponse, error) bool) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		stream, err := c.snapshots.WatchSnapshots(ctx, request)
		for err == nil {
			var event *pb.WatchSnapshotsResponse
			if event, err = stream.Recv(); err == nil && !yield(event, nil) {
				return
			}
		}
		yield(nil, typed(err))
	}
}

// Stop ends a generation by its name, cleanly. False if it had ended already.
func (c *Client) Stop(ctx context.Context, generation string) (bool, error) {
	reply, err := c.inference.StopGeneration(ctx, &pb.StopGenerationRequest{Generation: generation})
	return reply.GetWasRunning(), typed(err)
}

// CountTokens renders and tokenizes without running the model.
func (c *Client) CountTokens(ctx context.Context, request *pb.CountTokensRequest) (*pb.CountTokensResponse, error) {
	request = proto.CloneOf(request)
	request.Input = continued(request.Input, request.Parent)
	reply, err := c.inference.CountTokens(ctx, request)
	return reply, typed(err)
}

// ServerInfo tells versions, limits and features.
func (c *Client) ServerInfo(ctx context.Context) (*pb.GetServerInfoResponse, error) {
	reply, err := c.server.GetServerInfo(ctx, &pb.GetServerInfoRequest{})
	return reply, typed(err)
}

// Model tells about one model; an empty name means the only one.
func (c *Client) Model(ctx context.Context, name string) (*pb.Model, error) {
	reply, err := c.server.GetModel(ctx, &pb.GetModelRequest{Name: name})
	return reply.GetModel(), typed(err)
}

// CacheStats tells scheduler, memory and store in numbers.
func (c *Client) CacheStats(ctx context.Context) (*pb.CacheStats, error) {
	reply, err := c.server.GetCacheStats(ctx, &pb.GetCacheStatsRequest{})
	return reply.GetStats(), typed(err)
}

// Services are the generated clients on the same connection, for what this package does not wrap. Their errors become
// typed ones with AsError.
func (c *Client) Services() (pb.InferenceServiceClient, pb.SnapshotServiceClient, pb.ServerServiceClient) {
	return c.inference, c.snapshots, c.server
}

func (c *Client) handle(info *pb.Snapshot, usage *pb.Usage) *Snapshot {
	return &Snapshot{Info: info, Usage: usage, Marks: map[int]*Snapshot{}, client: c}
}
