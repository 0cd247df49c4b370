// The editor of a report: Ctrl+Enter saves, and what is not saved is not lost by accident.
const form = document.querySelector('[data-report-editor]')
const written = () => JSON.stringify([form.elements.title.value, form.elements.text.value])
const before = written()
let isSent = false
form.addEventListener('submit', () => { isSent = true })
form.addEventListener('keydown', (event) => {
  if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) form.requestSubmit()
})
addEventListener('beforeunload', (event) => {
  if (!isSent && written() !== before) event.preventDefault()
})
