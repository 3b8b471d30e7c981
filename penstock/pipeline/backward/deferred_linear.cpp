#include "penstock/deferred_linear.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/nn/init.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <mutex>
#include <ostream>
#include <utility>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/mode.h"
#include "penstock/pipeline/backward/graph_node.h"
#include "penstock/tensor_subclass.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "penstock/torch/recompute/recomputed_state.h"

namespace penstock {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

namespace {

at::Tensor rows_of(const at::Tensor& tensor) {
  return tensor.dim() == 2 ? tensor : tensor.reshape({-1, tensor.size(-1)});
}

// Computes the gradients of one layer's weights in the backward of the queue: edge 0 leads to the weight,
// edge 1 to the bias. Has the sequence number of the layer's node in the graph, so that gradients of tied
// weights are added in the order of that graph.
class WeightGradients final : public Node {
 public:
  WeightGradients(std::uint64_t number, edge_list&& edges, at::Tensor input, at::Tensor grad, bool flat_bias)
      : Node(number, std::move(edges)),
        inputs_{std::move(input)},
        grads_{std::move(grad)},
        flat_bias_(flat_bias) {
    add_input_metadata(grads_[0]);
  }

  // Returns whether the other's rows can be merged into this one: same weights and dtypes.
  bool joins(const WeightGradients& other) const {
    return next_edge(0) == other.next_edge(0) && next_edge(1) == other.next_edge(1) &&
           inputs_[0].scalar_type() == other.inputs_[0].scalar_type() &&
           grads_[0].scalar_type() == other.grads_[0].scalar_type();
  }
  // Takes the other's rows and leaves it empty.
  void take_rows(WeightGradients& other) {
    std::move(other.inputs_.begin(), other.inputs_.end(), std::back_inserter(inputs_));
    std::move(other.grads_.begin(), other.grads_.end(), std::back_inserter(grads_));
  }

 private:
  static at::Tensor joined(const std::vector<at::Tensor>& tensors) {
    if (tensors.size() == 1) return rows_of(tensors[0]);
    std::vector<at::Tensor> rows;
    rows.reserve(tensors.size());
    for (const at::Tensor& tensor : tensors) rows.push_back(rows_of(tensor));
    return at::cat(rows);
  }

  variable_list apply(variable_list&&) override {
    const std::vector<at::Tensor> inputs = std::exchange(inputs_, {}), grads = std::exchange(grads_, {});
    const at::Tensor grad = joined(grads);
    variable_list results(num_outputs());
    // Under autocast the layer computed in another dtype than that of its input.
    if (should_compute_output(0)) results[0] = grad.t().mm(joined(inputs).to(grad.scalar_type()));
    // The engine reduces to the shape of the bias, over the dims along which the layer broadcast it.
    if (should_compute_output(1)) results[1] = flat_bias_ || grads.size() > 1 ? grad : grads[0];
    return results;
  }

  std::vector<at::Tensor> inputs_, grads_;  // (..., in), (..., out): one pair for each backward
  bool flat_bias_;
};

thread_local std::shared_ptr<WeightQueue::State> current_queue;

}  // namespace

struct WeightQueue::State {
  mutable std::mutex mutex;
  std::vector<NodePtr> waiting;  // WeightGradients
  at::Tensor like;               // one of the gradients, for its device

  void note(NodePtr gradients, const at::Tensor& grad) {
    const std::lock_guard<std::mutex> lock(mutex);
    waiting.push_back(std::move(gradients));
    if (!like.defined()) like = grad;
  }
};

namespace {

// Attached to the output of a layer; keeps what the weight gradients need. Being a node, it sees the gradient
// after all hooks of the output. It then passes the gradient on to the graph of the layer or, if it knows the
// weight, computes the gradient of the input itself.
class NoteWeights final : public Node {
 public:
  NoteWeights(edge_list&& edges, const at::Tensor& input, const at::Tensor& weight, edge_list weights,
              bool flat_bias, std::weak_ptr<WeightQueue::State> queue)
      : Node(std::move(edges)),
        input_(input, /*is_output=*/false),
        weight_(weight, /*is_output=*/false),
        whole_layer_(weight.defined()),
        weights_(std::move(weights)),
        flat_bias_(flat_bias),
        queue_(std::move(queue)) {}

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    input_.reset_data();
    weight_.reset_data();
    weights_.clear();
    released_ = true;
  }

 private:
  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (released_)
      throw StateError(describe("backward of a DeferredLinear", "a second one through the same graph",
                                "one for each forward",
                                "run the forward again, or keep the graph with retain_graph"));
    const std::shared_ptr<WeightQueue::State> queue = queue_.lock();
    if (!queue)
      throw StateError(describe("backward of a DeferredLinear", "its WeightQueue was destroyed",
                                "the queue of the forward, still alive", "keep the queue until its run()"));
    if (!grads[0].defined()) return variable_list(1);
    if (c10::GradMode::is_enabled())
      throw NotImplemented(describe(
          "backward of a DeferredLinear", "recorded (create_graph)", "a backward without create_graph",
          "the gradients of its weights are computed later, without a history; leave "
          "the WeightQueue out where second derivatives are needed"));
    const at::Tensor grad = grads[0].detach(), input = input_.unpack();
    queue->note(
        make_node<WeightGradients>(sequence_nr(), edge_list(weights_), input.detach(), grad, flat_bias_),
        grad);
    if (!whole_layer_) return std::move(grads);
    if (!should_compute_output(0)) return variable_list(1);
    return {rows_of(grads[0]).mm(weight_.unpack()).view(input.sizes())};
  }

  SavedVariable input_, weight_;
  bool whole_layer_;  // edge 0 leads to the input
  edge_list weights_;
  bool flat_bias_, released_ = false;
  std::weak_ptr<WeightQueue::State> queue_;
};

// Whether at::linear flattened all leading dims, bias included, or added the bias to a result of many dims.
// That depends on the version and on strides; the node that it created shows it.
bool adds_bias_flat(const at::Tensor& output) {
  return output.dim() == 2 || output.grad_fn()->name().rfind("AddBackward", 0) != 0;
}

// Removes all edges that do not lead to `input`. Returns whether any is left.
bool keep_edges_to(const NodePtr& input, Node& node) {
  bool any = false;
  for (Edge& edge : node.next_edges()) {
    if (!edge.is_valid()) continue;
    if (edge.function == input || keep_edges_to(input, *edge.function))
      any = true;
    else
      edge = Edge();
  }
  return any;
}

// Runs the layer with a graph that leads only to the input, whether or not the input needs a gradient.
at::Tensor linear_of_input(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
  const at::Tensor tracked = input.requires_grad() ? input : input.detach().requires_grad_(true);
  at::Tensor w = weight.detach(), b = bias.defined() ? bias.detach() : bias;
  if (input.dim() <= 2 || input.is_contiguous()) return at::linear(tracked, w, b);
  // How LibTorch multiplies depends on whether the weight needs a gradient, so it must appear to need one.
  w.requires_grad_(weight.requires_grad());
  if (b.defined()) b.requires_grad_(bias.requires_grad());
  const at::Tensor output = at::linear(tracked, w, b);
  keep_edges_to(torch::autograd::impl::gradient_edge(tracked).function, *output.grad_fn());
  return output;
}

// Whether at::linear treats all rows as one matrix, with and without a bias, in every version: then its
// backward is known and need not be recorded.
bool is_one_product(const at::Tensor& input, const at::Tensor& weight) {
  return (input.dim() == 2 || input.dim() == 3) && input.is_contiguous() && input.numel() > 0 &&
         weight.size(1) > 1 && weight.is_contiguous() && !is_wrapper(input) && !is_wrapper(weight) &&
         current_mode() == nullptr && input.scalar_type() == weight.scalar_type() &&
         cast_once(input).is_same(input) && input.layout() == at::kStrided;
}

}  // namespace

WeightQueue::WeightQueue() : state_(std::make_shared<State>()) {}
WeightQueue::~WeightQueue() = default;
WeightQueue::WeightQueue(WeightQueue&&) noexcept = default;
WeightQueue& WeightQueue::operator=(WeightQueue&&) noexcept = default;

std::size_t WeightQueue::size() const {
  if (!state_) return 0;  // moved from
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->waiting.size();
}

void WeightQueue::join_layers() {
  if (empty()) return;
  const std::lock_guard<std::mutex> lock(state_->mutex);
  std::map<std::pair<Node*, Node*>, std::vector<WeightGradients*>> layers;  // by weight and bias
  std::vector<NodePtr> kept;
  for (NodePtr& node : state_->waiting) {
    auto* gradients = static_cast<WeightGradients*>(node.get());
    std::vector<WeightGradients*>& layer =
        layers[{gradients->next_edge(0).function.get(), gradients->next_edge(1).function.get()}];
    const auto same = std::find_if(layer.begin(), layer.end(),
                                   [&](const WeightGradients* known) { return known->joins(*gradients); });
    if (same != layer.end()) {
      (*same)->take_rows(*gradients);
    } else {
      layer.push_back(gradients);
      kept.push_back(std::move(node));
    }
  }
  state_->waiting = std::move(kept);
}

void WeightQueue::run() {
  if (empty()) return;
  std::vector<NodePtr> waiting;
  at::Tensor like;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    waiting.swap(state_->waiting);
    like = std::exchange(state_->like, {});
  }
  edge_list edges;
  edges.reserve(waiting.size());
  for (NodePtr& node : waiting) edges.emplace_back(std::move(node), 0);
  const std::size_t count = edges.size();
  PreparedBackward backward = PreparedBackward::from(std::move(edges), variable_list(count), like);
  like.reset();
  std::move(backward).run();
}

namespace {

// A recomputed layer must save what it saved the first time, which depends on the queue.
class QueueAsBefore {
 public:
  explicit QueueAsBefore(std::shared_ptr<WeightQueue::State> queue)
      : previous_(std::exchange(current_queue, std::move(queue))) {}
  ~QueueAsBefore() { current_queue = std::move(previous_); }
  QueueAsBefore(const QueueAsBefore&) = delete;
  QueueAsBefore& operator=(const QueueAsBefore&) = delete;

 private:
  std::shared_ptr<WeightQueue::State> previous_;
};

void restore_queues_when_recomputing() {
  static const bool registered = [] {
    register_recomputed_state([] {
      return [queue = std::weak_ptr<WeightQueue::State>(current_queue)]() -> std::shared_ptr<void> {
        return std::make_shared<QueueAsBefore>(queue.lock());
      };
    });
    return true;
  }();
  static_cast<void>(registered);
}

}  // namespace

WeightQueueGuard::WeightQueueGuard(WeightQueue& queue)
    : previous_(std::exchange(current_queue, queue.state_)) {
  restore_queues_when_recomputing();
}
WeightQueueGuard::~WeightQueueGuard() { current_queue = std::move(previous_); }

at::Tensor deferred_linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
  const bool weight_grad = weight.requires_grad(), bias_grad = bias.defined() && bias.requires_grad();
  // What is put into a queue is missing in the graph that records this call.
  if (!current_queue || !at::GradMode::is_enabled() || !(weight_grad || bias_grad) || is_recording())
    return at::linear(input, weight, bias);
  const bool whole_layer = is_one_product(input, weight);
  at::Tensor inner;
  {
    const at::AutoGradMode recording(!whole_layer);
    inner = whole_layer ? at::linear(input, weight, bias) : linear_of_input(input, weight, bias);
  }
  const at::Tensor output = whole_layer ? inner : inner.variable_data();
  edge_list to_inner(1), to_weights(2);
  if (input.requires_grad()) to_inner[0] = torch::autograd::impl::gradient_edge(whole_layer ? input : inner);
  if (weight_grad) to_weights[0] = torch::autograd::impl::gradient_edge(weight);
  if (bias_grad) to_weights[1] = torch::autograd::impl::gradient_edge(bias);
  auto node =
      make_node<NoteWeights>(std::move(to_inner), input, whole_layer ? weight : at::Tensor(),
                             std::move(to_weights), whole_layer || adds_bias_flat(inner), current_queue);
  const std::uint32_t place = node->add_input_metadata(output);
  torch::autograd::impl::set_gradient_edge(output, {std::move(node), place});
  return output;
}

DeferredLinearImpl::DeferredLinearImpl(const torch::nn::LinearOptions& options) : options(options) {
  DeferredLinearImpl::reset();
}

void DeferredLinearImpl::reset() {
  weight = register_parameter("weight", at::empty({options.out_features(), options.in_features()}));
  bias = register_parameter("bias", options.bias() ? at::empty({options.out_features()}) : at::Tensor(),
                            options.bias());
  reset_parameters();
}

void DeferredLinearImpl::reset_parameters() {
  torch::nn::init::kaiming_uniform_(weight, std::sqrt(5));
  if (!bias.defined()) return;
  const double bound = 1 / std::sqrt(static_cast<double>(options.in_features()));
  torch::nn::init::uniform_(bias, -bound, bound);
}

void DeferredLinearImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "penstock::DeferredLinear(in_features=" << options.in_features()
         << ", out_features=" << options.out_features() << ", bias=" << options.bias() << ")";
}

at::Tensor DeferredLinearImpl::forward(const at::Tensor& input) {
  return deferred_linear(input, weight, bias);
}

}  // namespace penstock
