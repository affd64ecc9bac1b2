package kvfork

import (
	"context"
	"errors"
	"sync/atomic"

	pb "kvfork.example/go/kvforkv1"

	"google.golang.org/protobuf/proto"
)

// Snapshot is a handle: a name for a state that never changes.
type Snapshot struct {
	Info     *pb.Snapshot      // what the server last said of it
	Usage    *pb.Usage         // the receipt of the call that made it; nil if it was looked up
	Marks    map[int]*Snapshot // of CreateSnapshot, by the index of their mark
	Released []string          // what its rollback let go of

	client *Client
	gone   atomic.Pointer[Error]
}

// Name is "snapshots/{id}".
func (s *Snapshot) Name() string { return s.Info.GetName() }

// TokenCount is the length of its prefix.
func (s *Snapshot) TokenCount() int { return int(s.Info.GetTokenCount()) }

// Gone is the error by which the server told that the snapshot is no more; nil as long as it has not.
func (s *Snapshot) Gone() *Error { return s.gone.Load() }

// Generate goes on from here; the request's parent is set. nil: go on with nothing to add.
func (s *Snapshot) Generate(ctx context.Context, request *pb.GenerateRequest) *Generation {
	if request == nil {
		request = &pb.GenerateRequest{}
	}
	request = proto.CloneOf(request)
	request.Parent = s.Name()
	return s.client.generate(ctx, request, s)
}

// Fork makes as many names for this state: nothing is copied. All or none.
func (s *Snapshot) Fork(ctx context.Context, count int) ([]*Snapshot, error) {
	branches := make([]*pb.ForkBranch, count)
	for index := range branches {
		branches[index] = &pb.ForkBranch{}
	}
	return s.ForkInto(ctx, branches...)
}

// ForkInto makes one child per branch, each with what it appends. All or none. Every child's Usage is the receipt of
// the whole call.
func (s *Snapshot) ForkInto(ctx context.Context, branches ...*pb.ForkBranch) ([]*Snapshot, error) {
	request := &pb.ForkRequest{Parent: s.Name(), RequestId: requestID("")}
	for _, branch := range branches {
		branch = proto.CloneOf(branch)
		branch.Append = continued(branch.Append, s.Name())
		request.Branches = append(request.Branches, branch)
	}
	reply, err := s.client.inference.Fork(ctx, request)
	if err != nil {
		return nil, s.noted(typed(err))
	}
	children := make([]*Snapshot, len(reply.Snapshots))
	for index, info := range reply.Snapshots {
		children[index] = s.client.handle(info, reply.Usage)
	}
	return children, nil
}

// RollbackOption says where a rollback cuts, or how.
type RollbackOption func(*pb.RollbackRequest)

// ToTokens keeps this many tokens.
func ToTokens(count int) RollbackOption {
	return func(r *pb.RollbackRequest) { r.Target = &pb.RollbackRequest_TokenCount{TokenCount: uint32(count)} }
}

// DropTokens drops this many from the end.
func DropTokens(count int) RollbackOption {
	return func(r *pb.RollbackRequest) { r.Target = &pb.RollbackRequest_DropTokens{DropTokens: uint32(count)} }
}

// ToAncestor goes back to a snapshot on the way.
func ToAncestor(name string) RollbackOption {
	return func(r *pb.RollbackRequest) { r.Target = &pb.RollbackRequest_Ancestor{Ancestor: name} }
}

// RoundDown cuts at the nearest stored place at or before the target, and computes nothing.
func RoundDown() RollbackOption {
	return func(r *pb.RollbackRequest) { r.Rounding = pb.Rounding_ROUNDING_DOWN }
}

// Release lets go of what is rolled back.
func Release(what pb.Release) RollbackOption {
	return func(r *pb.RollbackRequest) { r.Release = what }
}

// Rollback makes a snapshot of a shorter prefix: one of ToTokens, DropTokens and ToAncestor says where. This one stays,
// unless it is released.
func (s *Snapshot) Rollback(ctx context.Context, options ...RollbackOption) (*Snapshot, error) {
	request := &pb.RollbackRequest{Source: s.Name()}
	for _, option := range options {
		option(request)
	}
	request.RequestId = requestID(request.RequestId)
	reply, err := s.client.inference.Rollback(ctx, request)
	if err != nil {
		return nil, s.noted(typed(err))
	}
	made := s.client.handle(reply.Snapshot, reply.Usage)
	made.Released = reply.Released
	return made, nil
}

// Refresh reads Info again. It does not count as use.
func (s *Snapshot) Refresh(ctx context.Context) error {
	reply, err := s.client.snapshots.GetSnapshot(ctx, &pb.GetSnapshotRequest{Name: s.Name()})
	if err != nil {
		return s.noted(typed(err))
	}
	s.Info = reply.Snapshot
	return nil
}

// Tokens is the prefix as token ids.
func (s *Snapshot) Tokens(ctx context.Context) ([]uint32, error) {
	reply, err := s.client.snapshots.GetSnapshot(ctx, &pb.GetSnapshotRequest{Name: s.Name(), IncludeTokens: true})
	return reply.GetTokenIds(), s.noted(typed(err))
}

// Update changes labels, expiry or pin: those that are set in the change.
func (s *Snapshot) Update(ctx context.Context, change *pb.Snapshot) error {
	change = proto.CloneOf(change)
	change.Name = s.Name()
	reply, err := s.client.snapshots.UpdateSnapshot(ctx, &pb.UpdateSnapshotRequest{Snapshot: change})
	if err != nil {
		return s.noted(typed(err))
	}
	s.Info = reply.Snapshot
	return nil
}

// Delete drops the name; state shared with others stays. It is no error if it is gone already.
func (s *Snapshot) Delete(ctx context.Context) error {
	request := &pb.DeleteSnapshotRequest{Name: s.Name(), AllowMissing: true, StopActive: true}
	_, err := s.client.snapshots.DeleteSnapshot(ctx, request)
	return typed(err)
}

// noted remembers an error that tells the snapshot's end.
func (s *Snapshot) noted(err error) error {
	var failed *Error
	if errors.As(err, &failed) && errors.Is(failed, ErrGone) && (failed.Resource == "" || failed.Resource == s.Name()) {
		s.gone.Store(failed)
	}
	return err
}
