// Recorded calls, replayed without Python: see replay.py, which records them, builds this file and says what it is for.
//
// A call is known by a token and by how its tensors lie. What it does is a program over slots that hold tensors: those
// given come first. Forward and backward are two programs; the second begins with what the first has saved.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include <pybind11/stl.h>

namespace {

namespace py = pybind11;
using at::Tensor;
using Tensors = std::vector<Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// cuLaunchKernel: function, grid, block, bytes of shared memory, stream, arguments, options.
using LaunchKernel = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                             void**);
using StreamOf = int (*)(int32_t, void**);  // aoti_torch_get_current_cuda_stream: the device's current one

LaunchKernel launch_kernel = nullptr;
StreamOf stream_of = nullptr;
constexpr int64_t kNothing = -1;  // a slot that stands for None
constexpr int kNoMemory = 2;      // CUDA_ERROR_OUT_OF_MEMORY
constexpr uintptr_t kAlignment = 15;

// Memory with strides that holds the numbers themselves, which is all that is replayed.
bool is_plain(const Tensor& x) {
  const auto* impl = x.unsafeGetTensorImpl();
  const bool is_memory = x.layout() == at::kStrided && impl->has_storage() && !impl->is_python_dispatch();
  return is_memory && !x.is_neg() && !x.is_conj() && !x._is_zerotensor();
}

uintptr_t address_of(const Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.data_ptr()); }

struct Layout {
  std::vector<int64_t> sizes, strides;
  at::TensorOptions options;
  bool is_aligned;

  explicit Layout(const Tensor& x)
      : sizes(x.sizes().vec()),
        strides(x.strides().vec()),
        options(x.options()),
        is_aligned((address_of(x) & kAlignment) == 0) {}

  Tensor empty() const { return at::empty_strided(sizes, strides, options); }

  bool fits(const Tensor& x) const {
    if (!is_plain(x)) return false;
    const bool is_like = x.scalar_type() == options.dtype().toScalarType() && x.device() == options.device();
    const bool is_placed = x.strides() == strides && !(is_aligned && (address_of(x) & kAlignment));
    return is_like && is_placed && x.sizes() == sizes;
  }

  // The tensor, or a copy that lies as the recorded one did.
  Tensor fitted(const Tensor& x) const {
    if (fits(x)) return x;
    const Tensor copy = empty();
    Tensor to = copy, from = x;
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (strides[i] != 0 || sizes[i] < 2) continue;
      to = to.narrow(i, 0, 1);  // expanded: all along it are one number
      from = from.narrow(i, 0, 1);
    }
    to.copy_(from);
    return copy;
  }
};

// Where a program runs.
struct Place {
  void* stream;
  bool is_check;  // of the program: memory may hold what was computed there before, so it is filled with other numbers
};

struct Allocate {
  size_t slot;
  Layout layout;
  void run(Tensors& slots, const Place& place) const {
    slots[slot] = layout.empty();
    if (!place.is_check || slots[slot].numel() == 0) return;
    const auto num_bytes = static_cast<int64_t>(slots[slot].storage().nbytes());
    Tensor bytes = at::empty({0}, layout.options.dtype(at::kByte));
    bytes.set_(slots[slot].storage(), 0, {num_bytes}, {1}).fill_(0xFF);
  }
};

struct Release {
  size_t slot;
  void run(Tensors& slots, const Place&) const { slots[slot].reset(); }
};

// A kernel. Its arguments lie one after another, 8 bytes each: addresses of tensors, then numbers.
struct Launch {
  void* function;
  std::array<unsigned, 7> shape;
  std::vector<int64_t> tensors;  // slots
  std::vector<uint64_t> words;   // with room for the addresses
  std::vector<size_t> places;    // of the kernel's arguments among the words

  void run(Tensors& slots, const Place& place) const {
    c10::SmallVector<uint64_t, 64> data(words.begin(), words.end());
    c10::SmallVector<void*, 64> arguments;
    for (size_t i = 0; i < tensors.size(); ++i)
      data[i] = tensors[i] == kNothing ? 0 : address_of(slots[tensors[i]]);
    for (const size_t word : places) arguments.push_back(&data[word]);
    const auto try_it = [&] {
      const auto& [x, y, z, threads_x, threads_y, threads_z, shared_bytes] = shape;
      return launch_kernel(function, x, y, z, threads_x, threads_y, threads_z, shared_bytes, place.stream, arguments.data(),
                           nullptr);
    };
    int code = try_it();
    if (code != 0) {
      // CUDA's runtime may not have run in this thread, which then has no context: an operator of torch binds one. What
      // an earlier kernel broke, it tells better.
      slots[tensors.front()].new_zeros({1});
      code = try_it();
    }
    TORCH_CHECK_WITH(OutOfMemoryError, code != kNoMemory, "cuLaunchKernel: no memory for a replayed call");
    TORCH_CHECK(code == 0, "cuLaunchKernel: error ", code, " in a replayed call");
  }
};

// An operator of torch: constants with slots between them.
struct Operator {
  c10::OperatorHandle handle;
  torch::jit::Stack arguments;
  std::vector<std::pair<size_t, size_t>> given;  // argument, slot
  std::vector<int64_t> results;                  // a slot for each, or nothing

  void run(Tensors& slots, const Place&) const {
    torch::jit::Stack stack = arguments;
    for (const auto& [argument, slot] : given) stack[argument] = slots[slot];
    handle.callBoxed(stack);
    for (size_t i = 0; i < results.size(); ++i)
      if (results[i] != kNothing) slots[results[i]] = stack[i].toTensor();
  }
};

struct Program {
  std::vector<std::variant<Allocate, Release, Launch, Operator>> steps;

  void run(Tensors& slots, bool is_check = false) const {
    const auto& first = *std::find_if(slots.begin(), slots.end(), [](const Tensor& x) { return x.defined(); });
    const c10::DeviceGuard guard(first.device());
    Place place{nullptr, is_check};
    if (first.is_cuda()) TORCH_CHECK(stream_of(first.device().index(), &place.stream) == 0, "no current stream");
    for (const auto& step : steps) std::visit([&](const auto& each) { each.run(slots, place); }, step);
  }
};

using Slots = std::vector<std::pair<size_t, Tensor>>;  // with what they hold

struct Backward {
  Layout grad;  // of the output's gradient, whose slot comes after those of what is saved
  size_t num_slots;
  Slots constants;
  Program program;
  std::vector<int64_t> results;  // for each tensor given: the slot of its gradient, or nothing
};

struct Call {
  std::vector<size_t> given;  // slots of the tensors given
  size_t num_slots;
  Slots constants;
  Program forward;
  size_t output;
  std::optional<Layout> output_layout;
  std::vector<int64_t> saved;         // slots that backward begins with, or nothing
  std::vector<Layout> saved_layouts;  // of those that are something
  std::deque<Backward> backwards;     // one for each layout of the gradient
  std::mutex lock;                    // of these: engines run backward in threads of their own

  // What the forward pass computes, by slot.
  Tensors run(at::TensorList tensors, bool is_check = false) const {
    Tensors slots(num_slots);
    for (size_t i = 0; i < tensors.size(); ++i) slots[given[i]] = tensors[i];
    for (const auto& [slot, table] : constants) slots[slot] = table;
    const at::AutoDispatchBelowADInplaceOrView below;
    forward.run(slots, is_check);
    return slots;
  }

  const Backward* backward_for(const Tensor& grad) {
    const std::lock_guard guard(lock);
    for (const auto& each : backwards)
      if (each.grad.fits(grad)) return &each;
    return nullptr;
  }
};

// What autograd and replay.py know a call by: where it lies.
int64_t number_of(const Call& call) { return reinterpret_cast<int64_t>(&call); }
Call& call_of(int64_t number) { return *reinterpret_cast<Call*>(number); }

// --- calls by token and layout ---

using Key = std::vector<int64_t>;
struct Hash {
  size_t operator()(const Key& key) const {
    return std::hash<std::string_view>{}({reinterpret_cast<const char*>(key.data()), key.size() * sizeof(int64_t)});
  }
};
// An autograd graph may hold one at any time, a backward in another thread at exit too: none is ever freed; replay.py
// keeps them few.
std::unordered_map<Key, Call*, Hash> known;
const PyObject* watchers = nullptr;  // Triton's list of what is called before a launch
thread_local int64_t last_call = 0;  // that was replayed

// Write the key of a call and its tensors, without those that are None. Return false where a tensor is not plain.
bool write_key(Key& key, int64_t token, PyObject* const* given, size_t count, Tensors& tensors) {
  const bool has_grad = at::GradMode::is_enabled();
  key.assign(1, token);
  for (size_t i = 0; i < count; ++i) {
    if (given[i] == Py_None) {
      key.push_back(-1);
      continue;
    }
    if (!THPVariable_CheckExact(given[i])) return false;
    const Tensor& x = tensors.emplace_back(THPVariable_Unpack(given[i]));
    if (!is_plain(x)) return false;
    key.push_back(static_cast<int64_t>(x.scalar_type()) << 8 | x.dim());
    key.push_back(static_cast<int64_t>(x.device().type()) << 8 | static_cast<uint8_t>(x.device().index()));
    key.push_back(static_cast<int64_t>(address_of(x) & kAlignment) << 1 | (has_grad && x.requires_grad()));
    key.insert(key.end(), x.sizes().begin(), x.sizes().end());
    key.insert(key.end(), x.strides().begin(), x.strides().end());
  }
  return true;
}

// --- replays ---

// Gradients as they are, in a graph that leads to all they were computed from and refuses to be differentiated.
struct Final : torch::autograd::Function<Final> {
  static variable_list forward(AutogradContext*, at::TensorList tensors, int64_t count) {
    variable_list results;
    for (const auto& x : tensors.slice(0, count)) results.push_back(x.view_as(x));
    return results;
  }
  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK(false,
                "expected one derivative; got a second: this kernel's backward is written by hand ",
                "(once_differentiable); the `reference` of a variant has derivatives of any order");
  }
};

// Whether somebody looks at what is launched or called; see replay.py. Of the list only the size is read.
bool is_watched() {
  const bool has_hooks = watchers && PyList_Check(watchers) && PyList_GET_SIZE(watchers) > 0;
  return has_hooks || c10::impl::TorchDispatchModeTLS::any_modes_set();
}

py::object* differentiate = nullptr;  // replay.py's: (call, saved, gradient of the output) -> gradients

py::object as_python(const Tensor& x) {
  return x.defined() ? py::reinterpret_steal<py::object>(THPVariable_Wrap(x)) : py::none();
}

Tensor as_tensor(const py::handle& x) { return x.is_none() ? Tensor() : THPVariable_Unpack(x.ptr()); }

variable_list run(const Backward& backward, const variable_list& saved, const Tensor& grad, bool is_check = false) {
  Tensors slots(saved.begin(), saved.end());
  slots.resize(backward.num_slots);
  slots[saved.size()] = grad;
  for (const auto& [slot, table] : backward.constants) slots[slot] = table;
  const at::AutoDispatchBelowADInplaceOrView below;
  backward.program.run(slots, is_check);
  variable_list results;
  for (const int64_t slot : backward.results) results.push_back(slot == kNothing ? Tensor() : slots[slot]);
  return results;
}

// The gradients by Python, which learns from it how those of the next call are computed.
variable_list run_in_python(const Call& call, const variable_list& saved, const Tensor& grad) {
  const py::gil_scoped_acquire gil;
  try {
    py::list tensors;
    for (const auto& x : saved) tensors.append(as_python(x));
    const auto found = (*differentiate)(number_of(call), tensors, as_python(grad)).cast<py::tuple>();
    variable_list results;
    for (const size_t slot : call.given) results.push_back(as_tensor(py::object(found[slot])));
    return results;
  } catch (py::error_already_set& error) {  // as what it is: who is told of too little memory tells it by its type
    error.restore();
    python_error kept;
    kept.persist();
    throw kept;
  }
}

struct Replay : torch::autograd::Function<Replay> {
  static Tensor forward(AutogradContext* context, at::TensorList given, int64_t number) {
    const Call& call = call_of(number);
    const Tensors slots = call.run(given);
    variable_list saved;
    for (const int64_t slot : call.saved)
      if (slot != kNothing) saved.push_back(slots[slot]);
    context->save_for_backward(std::move(saved));
    context->saved_data["call"] = number;
    context->set_materialize_grads(false);
    return slots[call.output];
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    Call& call = call_of(context->saved_data["call"].toInt());
    const variable_list kept = context->get_saved_variables();
    variable_list results;
    const bool is_final = at::GradMode::is_enabled();
    {
      const at::NoGradGuard no_grad;
      // Hooks on saved tensors, such as those that offload them, may change how they lie.
      variable_list saved;
      size_t next = 0;
      for (const int64_t slot : call.saved) {
        saved.push_back(slot == kNothing ? Tensor() : call.saved_layouts[next].fitted(kept[next]));
        next += slot != kNothing;
      }
      Tensor grad = grads[0].defined() ? grads[0] : call.output_layout->empty().zero_();
      if (is_plain(grad) && grad.stride(-1) != 1) grad = grad.contiguous();  // that of a sum is one number expanded
      const Backward* known = is_watched() ? nullptr : call.backward_for(grad);
      results = known ? run(*known, saved, grad) : run_in_python(call, saved, grad);
    }
    if (is_final) make_final(results, kept, grads);
    results.emplace_back();  // of the call's number
    return results;
  }

  static void make_final(variable_list& results, const variable_list& saved, const variable_list& grads) {
    variable_list tensors;
    const auto add_from = [&](const variable_list& more) {
      std::copy_if(more.begin(), more.end(), std::back_inserter(tensors), [](const Tensor& x) { return x.defined(); });
    };
    add_from(results);
    const auto count = static_cast<int64_t>(tensors.size());
    add_from(saved);
    add_from(grads);
    const variable_list made = Final::apply(at::TensorList(tensors), count);
    auto next = made.begin();
    for (auto& result : results)
      if (result.defined()) result = *next++;
  }
};

// call(token, *tensors): the output, or None where no such call is known.
PyObject* call(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  thread_local Key key;
  Tensors tensors;
  tensors.reserve(count);
  if (!write_key(key, PyLong_AsLongLong(given[0]), given + 1, count - 1, tensors)) Py_RETURN_NONE;
  const auto found = known.find(key);
  if (found == known.end()) Py_RETURN_NONE;
  last_call = number_of(*found->second);
  Tensor output;
  {
    // As torch's own functions do: a launch may wait for room in the device's queue, while the device waits for what
    // another thread is to launch; and cuDNN plans for a tenth of a second.
    const py::gil_scoped_release released;
    output = Replay::apply(at::TensorList(tensors), last_call);
  }
  return THPVariable_Wrap(std::move(output));
  END_HANDLE_TH_ERRORS
}

// --- what replay.py says of a call ---

Layout layout_of(const py::handle& tensor) { return Layout(THPVariable_Unpack(tensor.ptr())); }

c10::IValue constant(const py::handle& value) {
  if (value.is_none()) return {};
  if (py::isinstance<py::bool_>(value)) return value.cast<bool>();
  if (py::isinstance<py::int_>(value)) return value.cast<int64_t>();
  if (py::isinstance<py::float_>(value)) return value.cast<double>();
  throw py::type_error("expected None, a bool, an int or a float among the arguments of an operator");
}

Program program_of(const py::list& steps) {
  Program program;
  for (const auto& each : steps) {
    const auto step = each.cast<py::tuple>();
    const auto name = step[0].cast<std::string>();
    if (name == "allocate") {
      program.steps.emplace_back(Allocate{step[1].cast<size_t>(), layout_of(step[2])});
    } else if (name == "release") {
      program.steps.emplace_back(Release{step[1].cast<size_t>()});
    } else if (name == "launch") {
      Launch launch{reinterpret_cast<void*>(step[1].cast<uintptr_t>()),
                    step[2].cast<std::array<unsigned, 7>>(),
                    step[3].cast<std::vector<int64_t>>(),
                    {},
                    step[5].cast<std::vector<size_t>>()};
      const auto numbers = step[4].cast<std::string>();  // bytes
      launch.words.resize(launch.tensors.size() + numbers.size() / sizeof(uint64_t));
      std::memcpy(launch.words.data() + launch.tensors.size(), numbers.data(), numbers.size());
      for (const size_t place : launch.places)
        TORCH_CHECK(place < launch.words.size(), "an argument lies beyond the words");
      program.steps.emplace_back(std::move(launch));
    } else {
      TORCH_CHECK(name == "operator", "unknown step ", name);
      const auto base = step[1].cast<std::string>(), overload = step[2].cast<std::string>();
      Operator op{c10::Dispatcher::singleton().findSchemaOrThrow(base.c_str(), overload.c_str()),
                  {},
                  step[4].cast<std::vector<std::pair<size_t, size_t>>>(),
                  step[5].cast<std::vector<int64_t>>()};
      for (const auto& value : step[3]) op.arguments.push_back(constant(value));
      program.steps.emplace_back(std::move(op));
    }
  }
  return program;
}

Slots slots_of(const py::list& pairs) {
  Slots found;
  for (const auto& each : pairs) {
    const auto pair = each.cast<py::tuple>();
    found.emplace_back(pair[0].cast<size_t>(), as_tensor(py::object(pair[1])));
  }
  return found;
}

// Return the key of a call; it is empty where a tensor is not plain.
Key key_of(int64_t token, const py::tuple& given, Tensors& tensors) {
  Key key;
  std::vector<PyObject*> objects;
  for (const auto& each : given) objects.push_back(each.ptr());
  tensors.reserve(objects.size());
  if (!write_key(key, token, objects.data(), objects.size(), tensors)) key.clear();
  return key;
}

bool are_plain(const py::tuple& given) {
  Tensors tensors;
  return !key_of(0, given, tensors).empty();
}

// Learn a call, unless what it computes is not right: `is_right` takes its number, its output and what it saves.
bool learn(int64_t token, const py::tuple& given, size_t num_slots, const py::list& constants, const py::list& forward,
           const py::object& output, size_t output_slot, const py::list& saved, const std::vector<int64_t>& saved_slots,
           const py::function& is_right) {
  Tensors tensors;
  Key key = key_of(token, given, tensors);
  TORCH_CHECK(!key.empty(), "expected plain tensors");
  auto owner = std::make_unique<Call>();
  Call& made = *owner;
  for (size_t i = 0; i < given.size(); ++i)
    if (!given[i].is_none()) made.given.push_back(i);
  made.num_slots = num_slots;
  made.constants = slots_of(constants);
  made.forward = program_of(forward);
  made.output = output_slot;
  made.output_layout.emplace(as_tensor(output));
  made.saved = saved_slots;
  for (const auto& x : saved)
    if (!x.is_none()) made.saved_layouts.push_back(layout_of(x));
  const at::NoGradGuard no_grad;
  const Tensors slots = made.run(tensors, true);
  py::list found;
  for (const int64_t slot : saved_slots) found.append(slot == kNothing ? py::none() : as_python(slots[slot]));
  if (!is_right(number_of(made), as_python(slots[output_slot]), found).cast<bool>()) return false;
  known[std::move(key)] = owner.release();
  return true;
}

// Learn a backward pass, unless its gradients are not right.
bool learn_backward(int64_t number, const py::list& saved, const py::object& grad, size_t num_slots,
                    const py::list& constants, const py::list& steps, const std::vector<int64_t>& results,
                    const py::function& are_right) {
  Call& call = call_of(number);
  std::vector<int64_t> wanted;
  for (const size_t slot : call.given) wanted.push_back(results[slot]);
  Backward made{layout_of(grad), num_slots, slots_of(constants), program_of(steps), std::move(wanted)};
  variable_list tensors;
  for (const auto& x : saved) tensors.push_back(as_tensor(x));
  py::list found;
  for (const auto& x : run(made, tensors, as_tensor(grad), true))
    if (x.defined()) found.append(as_python(x));
  if (!are_right(found).cast<bool>()) return false;
  const std::lock_guard guard(call.lock);
  call.backwards.push_back(std::move(made));
  return true;
}

PyMethodDef call_method = {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)), METH_FASTCALL,
                           "call(token, *tensors): the output, or None where no such call is known"};

}  // namespace

PYBIND11_MODULE(attn_zoo_replay, module) {
  module.def("use", [](uintptr_t launch, uintptr_t stream, const py::object& hooks, const py::object& backward) {
    watchers = py::object(hooks).release().ptr();
    launch_kernel = reinterpret_cast<LaunchKernel>(launch);
    stream_of = reinterpret_cast<StreamOf>(stream);
    differentiate = new py::object(backward);  // never freed: an autograd graph may outlive this module
  });
  module.def("are_plain", &are_plain);
  module.def("learn", &learn);
  module.def("learn_backward", &learn_backward);
  module.def("forget_all", [] { known.clear(); });
  module.def("last", [] { return last_call; });
  py::object function = py::reinterpret_steal<py::object>(PyCFunction_New(&call_method, nullptr));
  module.attr("call") = function;
}
