// Counts the floating-point operations of a model, per module, forward and backward, even of a model that
// does not fit in memory.
//
//   FlopCounter counter;
//   ModeGuard guard(counter);
//   model->forward(tokens).sum().backward();      // inside: FlopCounter::Scope scope("layers.0");
//   counter.print();
//
// FlopCounter is a mode: it sees every operator, counts matrix products by the shapes of their arguments, and
// runs the operator. C++ modules have no hooks, so a module names itself with a Scope. Backward does not need
// scopes: autograd numbers the nodes of its graph in the order of the forward pass, a Scope records the
// numbers at its begin and end, and an operator called by a backward node belongs to the scope that contains
// the node's number.
//
// The program checks the counts against the formula 2 * m * n * k and fails (exit code 1) if one is wrong.
#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <fmt/format.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "examples/failure.h"
#include "penstock/fake.h"
#include "penstock/mode.h"

using namespace penstock;
using torch::Tensor;

class FlopCounter final : public Mode {
 public:
  FlopCounter() { watch_backward(); }

  struct Count {
    std::int64_t forward = 0, backward = 0;
  };

  // Operators that run during its lifetime, and their backward, count for `name`, or for "outer.name" inside
  // another scope. Does nothing if no FlopCounter is active.
  class Scope {
   public:
    explicit Scope(const std::string& name) : counter_(find_mode<FlopCounter>()) {
      if (!counter_) return;
      outer_ = counter_->scope_of(here());
      counter_->enter(outer_.empty() ? name : outer_ + "." + name);
    }
    ~Scope() {
      if (counter_) counter_->enter(outer_);
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    FlopCounter* counter_;
    std::string outer_;
  };

  void dispatch(const c10::OperatorHandle& op, Stack* stack) override {
    const auto found = kFormulas.find(op.operator_name().name);
    if (found == kFormulas.end()) return op.callBoxed(stack);
    const auto first = stack->end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size());
    const Stack arguments(first, stack->end());  // a copy, since the results will replace them on the stack
    op.callBoxed(stack);
    const std::int64_t flops =
        found->second(arguments, stack->at(stack->size() - op.schema().returns().size()));
    const bool backward = !backward_nodes.empty();
    const std::string scope = scope_of(backward ? backward_nodes.back() : here());
    const std::lock_guard lock(mutex_);  // backward on a GPU runs on a separate thread
    Count& count = counts_[scope];
    (backward ? count.backward : count.forward) += flops;
  }

  std::map<std::string, Count> counts() const {
    const std::lock_guard lock(mutex_);
    return counts_;
  }
  Count total() const {
    Count total;
    for (const auto& [name, count] : counts())
      total = {total.forward + count.forward, total.backward + count.backward};
    return total;
  }
  void print() const {
    const Count all = total();
    const auto row = [&](const std::string& name, const Count& count) {
      fmt::print("{:<24} {:>16} {:>16} {:>7.1f} %\n", name, count.forward, count.backward,
                 100.0 * static_cast<double>(count.forward + count.backward) /
                     static_cast<double>(all.forward + all.backward));
    };
    fmt::print("{:<24} {:>16} {:>16} {:>9}\n", "module", "forward FLOPs", "backward FLOPs", "share");
    for (const auto& [name, count] : counts()) row(name.empty() ? "(no scope)" : name, count);
    row("total", all);
  }

 private:
  // A moment of a forward pass: a thread, and how many graph nodes it had created. Nodes carry both.
  using Moment = std::pair<std::uint64_t, std::uint64_t>;
  static Moment here() { return {at::RecordFunction::currentThreadId(), at::sequence_number::peek()}; }

  void enter(const std::string& name) {
    const std::lock_guard lock(mutex_);
    entered_[here()] = name;
  }
  std::string scope_of(Moment moment) const {
    const std::lock_guard lock(mutex_);
    const auto after = entered_.upper_bound(moment);
    return after == entered_.begin() || std::prev(after)->first.first != moment.first
               ? ""
               : std::prev(after)->second;
  }

  // The nodes that this thread is running, outermost first. LibTorch notifies its observers of each.
  static thread_local std::vector<Moment> backward_nodes;
  static void watch_backward() {
    [[maybe_unused]] static const auto handle = at::addGlobalCallback(
        at::RecordFunctionCallback(
            [](const at::RecordFunction& node) -> std::unique_ptr<at::ObserverContext> {
              backward_nodes.emplace_back(node.forwardThreadId(), static_cast<std::uint64_t>(node.seqNr()));
              return nullptr;
            },
            [](const at::RecordFunction&, at::ObserverContext*) { backward_nodes.pop_back(); })
            .scopes({at::RecordScope::BACKWARD_FUNCTION}));
  }

  // Computed from the arguments and the first result; a multiply-add counts as two operations.
  using Formula = std::int64_t (*)(const Stack& arguments, const c10::IValue& result);
  static std::int64_t product(const Tensor& a, const Tensor& b) {
    return 2 * a.numel() * b.size(-1);
  }  // (..., m, k) x (..., k, n)
  static std::int64_t convolution(
      const Tensor& weight, const Tensor& small) {  // every weight is applied at every position of `small`
    return 2 * weight.numel() * (small.numel() / small.size(1));
  }
  static std::int64_t attention(const Tensor& query, const Tensor& key,
                                const Tensor& value) {  // scores, then their values
    return 2 * query.numel() / query.size(-1) * key.size(-2) * (query.size(-1) + value.size(-1));
  }
  static const std::map<std::string, Formula> kFormulas;

  mutable std::mutex mutex_;
  std::map<std::string, Count> counts_;
  std::map<Moment, std::string> entered_;  // the scope from that moment on
};

thread_local std::vector<FlopCounter::Moment> FlopCounter::backward_nodes;

const std::map<std::string, FlopCounter::Formula> FlopCounter::kFormulas = [] {
  std::map<std::string, Formula> formulas;
  formulas["aten::mm"] = formulas["aten::bmm"] = [](const Stack& a, const c10::IValue&) {
    return product(a[0].toTensor(), a[1].toTensor());
  };
  formulas["aten::addmm"] = formulas["aten::baddbmm"] = [](const Stack& a, const c10::IValue&) {
    return product(a[1].toTensor(), a[2].toTensor());
  };
  // input, weight, bias, stride, padding, dilation, transposed, ...
  formulas["aten::convolution"] = [](const Stack& a, const c10::IValue& result) {
    return convolution(a[1].toTensor(), a[6].toBool() ? a[0].toTensor() : result.toTensor());
  };
  // grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups,
  // which gradients
  formulas["aten::convolution_backward"] = [](const Stack& a, const c10::IValue&) {
    const auto wanted = a[10].toBoolList();
    return (int{wanted[0]} + int{wanted[1]}) *
           convolution(a[2].toTensor(), a[7].toBool() ? a[1].toTensor() : a[0].toTensor());
  };
  // Fused attention of LibTorch 2. Its backward recomputes the scores: five products for the two of forward.
  for (const char* kernel :
       {"flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"}) {
    const std::string name = std::string("aten::_scaled_dot_product_") + kernel;
    formulas[name] = [](const Stack& a, const c10::IValue&) {
      return attention(a[0].toTensor(), a[1].toTensor(), a[2].toTensor());
    };
    formulas[name + "_backward"] = [](const Stack& a, const c10::IValue&) {
      return attention(a[1].toTensor(), a[2].toTensor(), a[3].toTensor()) / 2 * 5;
    };
  }
  return formulas;
}();

// ---- a transformer in the shape of GPT-2 ----

struct Shape {
  std::int64_t vocabulary, context, width, heads, layers;
};

struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(const Shape& shape) : heads(shape.heads) {
    const std::int64_t width = shape.width;
    norm1 = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    qkv = register_module("qkv", torch::nn::Linear(width, 3 * width));
    projection = register_module("projection", torch::nn::Linear(width, width));
    norm2 = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    up = register_module("up", torch::nn::Linear(width, 4 * width));
    down = register_module("down", torch::nn::Linear(4 * width, width));
  }

  Tensor forward(const Tensor& x) {
    const Tensor y = x + attention(norm1->forward(x));
    const FlopCounter::Scope scope("mlp");
    return y + down->forward(torch::gelu(up->forward(norm2->forward(y))));
  }

  Tensor attention(const Tensor& x) {  // (batch, time, width)
    const FlopCounter::Scope scope("attention");
    const std::int64_t batch = x.size(0), time = x.size(1), size = x.size(2) / heads;
    // query, key and value, each (batch, heads, time, size)
    const auto parts = qkv->forward(x).view({batch, time, 3, heads, size}).permute({2, 0, 3, 1, 4}).unbind(0);
    const Tensor scores =
        torch::matmul(parts[0], parts[1].transpose(2, 3)) / std::sqrt(static_cast<double>(size));
    const Tensor future = torch::ones({time, time}, torch::kBool).triu(1);
    const Tensor mixed = torch::matmul(scores.masked_fill(future, -1e9).softmax(-1), parts[2]);
    return projection->forward(mixed.transpose(1, 2).reshape({batch, time, heads * size}));
  }

  std::int64_t heads;
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear qkv{nullptr}, projection{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(Layer);

struct TransformerImpl : torch::nn::Module {
  explicit TransformerImpl(const Shape& shape) {
    tokens = register_module("tokens", torch::nn::Embedding(shape.vocabulary, shape.width));
    positions = register_module("positions", torch::nn::Embedding(shape.context, shape.width));
    for (std::int64_t i = 0; i < shape.layers; ++i) layers->push_back(Layer(shape));
    register_module("layers", layers);
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({shape.width})));
  }

  // (batch, time) to (batch, time, vocabulary)
  Tensor forward(const Tensor& input) {
    Tensor x = tokens->forward(input) + positions->forward(torch::arange(input.size(1)));
    for (std::size_t i = 0; i < layers->size(); ++i) {
      const FlopCounter::Scope scope(fmt::format("layers.{}", i));
      x = layers->ptr<LayerImpl>(i)->forward(x);
    }
    const FlopCounter::Scope scope("head");
    return torch::matmul(norm->forward(x), tokens->weight.t());  // the head shares the embedding's weight
  }

  torch::nn::Embedding tokens{nullptr}, positions{nullptr};
  torch::nn::ModuleList layers;
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Transformer);

// The expected cost of forward: four matrices of attention (qkv counts as three) and two of the mlp, the two
// products of attention in each layer, and the head.
std::int64_t expected_forward(const Shape& shape, std::int64_t batch, std::int64_t time) {
  const std::int64_t rows = batch * time, width = shape.width;
  const std::int64_t layer = 2 * rows * width * (3 + 1 + 4 + 4) * width + 2 * 2 * rows * time * width;
  return shape.layers * layer + 2 * rows * width * shape.vocabulary;
}

// ---- the runs ----

bool check(bool good, const std::string& what) {
  fmt::print("{} {}\n", good ? "ok:    " : "FAILED:", what);
  return good;
}

void forward_and_backward(Transformer& model, const Shape& shape, std::int64_t batch, std::int64_t time) {
  const Tensor input = torch::randint(shape.vocabulary, {batch, time}, torch::kLong);
  const Tensor target = torch::randint(shape.vocabulary, {batch * time}, torch::kLong);
  torch::cross_entropy_loss(model->forward(input).view({batch * time, shape.vocabulary}), target).backward();
}

// Every product of forward has two in backward: the gradients of both factors.
bool check_transformer(const FlopCounter::Count& total, const Shape& shape, std::int64_t batch,
                       std::int64_t time) {
  const std::int64_t expected = expected_forward(shape, batch, time);
  return check(total.forward == expected && total.backward == 2 * expected,
               fmt::format("the transformer costs {} forward and {} backward, by the formula {} and {}",
                           total.forward, total.backward, expected, 2 * expected));
}

bool small_transformer() {
  const Shape shape{.vocabulary = 100, .context = 16, .width = 32, .heads = 4, .layers = 2};
  Transformer model(shape);
  FlopCounter counter;
  {
    const ModeGuard guard(counter);
    forward_and_backward(model, shape, 3, 16);
  }
  counter.print();
  bool good = check_transformer(counter.total(), shape, 3, 16);
  for (const auto& [name, count] : counter.counts())
    good &= check(!name.empty() && count.backward == 2 * count.forward,
                  fmt::format("{}: backward costs twice its forward", name));
  return good;
}

// With shapes only: FakeMode first, then the counter on top of it.
bool gpt2_without_memory() {
  const Shape shape{.vocabulary = 50257, .context = 1024, .width = 768, .heads = 12, .layers = 12};
  const std::int64_t batch = 8;
  const auto start = std::chrono::steady_clock::now();
  FakeMode fake;
  FlopCounter counter;
  std::int64_t parameters = 0;
  {
    const ModeGuard shapes_only(fake);
    const ModeGuard guard(counter);
    Transformer model(shape);
    forward_and_backward(model, shape, batch, shape.context);
    for (const Tensor& parameter : model->parameters()) parameters += parameter.numel();
  }
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
  const FlopCounter::Count total = counter.total();
  fmt::print(
      "GPT-2, {} parameters, {} x {} tokens: {:.2f} TFLOP for forward and backward, counted in {:.0f} ms "
      "without memory\n",
      parameters, batch, shape.context, static_cast<double>(total.forward + total.backward) * 1e-12,
      took.count());
  const bool good = check(parameters == 124'439'808, "the model has the parameters of GPT-2");
  return check_transformer(total, shape, batch, shape.context) && good;
}

bool convolutions() {
  FlopCounter counter;
  {
    const ModeGuard guard(counter);
    torch::nn::Conv2d conv(torch::nn::Conv2dOptions(6, 8, 3).groups(2).padding(1));
    torch::nn::ConvTranspose2d wide(torch::nn::ConvTranspose2dOptions(8, 4, 2).stride(2));
    const FlopCounter::Scope scope("convolutions");
    wide->forward(conv->forward(torch::ones({2, 6, 10, 10}))).sum().backward();
  }
  const std::int64_t first = 2 * (2 * 8 * 10 * 10) * (6 / 2 * 3 * 3),
                     second = 2 * (2 * 8 * 10 * 10) * (4 * 2 * 2);
  const FlopCounter::Count total = counter.total();
  return check(
      total.forward == first + second && total.backward == first + 2 * second,  // the input needs no gradient
      fmt::format("convolutions cost {} forward and {} backward", total.forward, total.backward));
}

// scaled_dot_product_attention, if this LibTorch has it: fused or not, the products are the same.
bool fused_attention() {
  const auto op = c10::Dispatcher::singleton().findSchema({"aten::scaled_dot_product_attention", ""});
  if (!op) return true;
  FlopCounter counter;
  {
    const ModeGuard guard(counter);
    Stack stack;
    for (int i = 0; i < 3; ++i) stack.emplace_back(torch::randn({2, 4, 16, 8}).set_requires_grad(true));
    for (std::size_t i = 3; i < op->schema().arguments().size(); ++i)
      stack.push_back(*op->schema().arguments()[i].default_value());
    op->callBoxed(&stack);
    stack.back().toTensor().sum().backward();
  }
  const std::int64_t product = 2 * 2 * 4 * 16 * 16 * 8;
  const FlopCounter::Count total = counter.total();
  return check(
      total.forward == 2 * product && (total.backward == 4 * product || total.backward == 5 * product),
      fmt::format("attention costs {} forward and {} backward", total.forward, total.backward));
}

int main() try {
  bool good = small_transformer();
  good &= gpt2_without_memory();
  good &= convolutions();
  good &= fused_attention();
  return good ? 0 : 1;
} catch (...) {
  return failure("flop_counter");
}
